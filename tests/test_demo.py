"""`python -m clusterkv_ops.profile run`: what it measures, prints and writes."""

from __future__ import annotations

import json
import math
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from clusterkv_ops import profile

pytest.importorskip("transformers")
pytest.importorskip("rich")

from clusterkv_ops.graphs.backend import clusterkv_backend
from clusterkv_ops.profiling import demo, run, smollm2
from clusterkv_ops.profiling.measure import compiled_in_place, run_model

CONTEXT, HELD_OUT, NEW = 300, 16, 6


def tiny() -> tuple[Any, Any]:
    """A decoder of three layers with random weights, and its tokenizer."""
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=256,
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
    )
    return LlamaForCausalLM(config).eval(), demo.ByteTokenizer()


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """The rest of the graph is not compiled: that is Inductor's time, not ours."""
    monkeypatch.setattr(run, "clusterkv_backend", partial(clusterkv_backend, inner="eager"))


def run_tiny(folder: Path, *options: str) -> dict[str, Any]:
    """The JSON of one run of the tiny model."""
    file = folder / "numbers.json"
    sizes = ["--context", str(CONTEXT), "--held-out", str(HELD_OUT), "--tokens", str(NEW)]
    command = ["run", f"{__name__}:tiny", *sizes, "-o", str(folder / "out"), "--json", str(file)]
    assert profile.main([*command, "--baseline", "eager", *options]) == 0
    answer: dict[str, Any] = json.loads(file.read_text())
    return answer


@pytest.mark.usefixtures("quick")
def test_run_prints_one_table_and_writes_the_same_as_json(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    answer = run_tiny(tmp_path, "--budget", "64")
    printed = capsys.readouterr().out
    dense, sparse = answer["run"]["dense"], answer["run"]["sparse"]
    assert answer["schema"] == "clusterkv.profile/1"
    assert f"{sparse['ms_per_token']:.1f}" in printed
    assert f"{dense['perplexity']:.3f}" in printed
    assert sparse["sparse_steps"] == HELD_OUT + NEW  # layer 2
    assert sparse["dense_steps"] == 2 * (HELD_OUT + NEW)  # layers 0 and 1
    assert 0 < sparse["selection_pct_of_decode"] < 100
    assert sparse["clustering_pct_of_prefill"] > 0
    assert sparse["kv_bytes_per_token"] < dense["kv_bytes_per_token"]
    assert len(sparse["step_ms"]) == len(sparse["tokens"]) == NEW


@pytest.mark.usefixtures("quick")
def test_budget_over_the_context_gives_the_dense_numbers(tmp_path: Path) -> None:
    numbers = run_tiny(tmp_path, "--budget", "1024")["run"]
    assert numbers["sparse"]["tokens"] == numbers["dense"]["tokens"]
    assert numbers["equal_tokens"] == NEW
    assert numbers["sparse"]["perplexity"] == pytest.approx(numbers["dense"]["perplexity"])
    assert numbers["sparse"]["sparse_steps"] == 0


@pytest.mark.usefixtures("quick")
def test_trace_shows_prompt_and_steps_with_their_phases(tmp_path: Path) -> None:
    answer = run_tiny(tmp_path, "--budget", "64", "--no-async")
    seen = {(row["mode"], row["phase"]) for row in answer["phases"]}
    assert {("prefill", "clustering"), ("decode", "selection"), ("decode", "attention")} <= seen
    calls = {row["mode"]: row["calls"] for row in answer["modes"]}
    assert calls["prefill"] == 1
    assert calls["decode"] == 8
    written = {path.name for path in (tmp_path / "out").iterdir()}
    assert {"run.kineto.json.gz", "run.pt.trace.json.gz", "report.json", "report.html"} <= written


@pytest.mark.usefixtures("quick")
def test_offload_changes_no_token(tmp_path: Path) -> None:
    kept = run_tiny(tmp_path, "--budget", "64")["run"]["sparse"]
    moved = run_tiny(tmp_path, "--budget", "64", "--offload")["run"]
    assert moved["sparse"]["tokens"] == kept["tokens"]
    assert moved["sparse"]["perplexity"] == kept["perplexity"]
    assert moved["stats"]["recall_hits"] + moved["stats"]["recall_misses"] > 0


def test_perplexity_is_that_of_one_uncached_pass() -> None:
    model, tokenizer = tiny()
    tokens = demo.document(tokenizer, CONTEXT + HELD_OUT)
    with compiled_in_place(model, None):
        result = run_model(model, tokens, num_context=CONTEXT, num_new=1)
    with torch.no_grad():
        scores = model(torch.tensor([tokens])).logits[0, CONTEXT - 1 : -1].log_softmax(-1)
    wanted = torch.tensor(tokens[CONTEXT:])
    loss = torch.nn.functional.nll_loss(scores, wanted).item()
    assert result.perplexity == pytest.approx(math.exp(loss), rel=1e-4)


def test_compilation_is_excluded_and_a_growing_cache_compiles_once() -> None:
    model, tokenizer = tiny()
    backend = clusterkv_backend(64, inner="eager")
    tokens = demo.document(tokenizer, CONTEXT + HELD_OUT)
    with compiled_in_place(model, backend):
        result = run_model(model, tokens, num_context=CONTEXT, num_new=NEW)
    assert backend.stats().graphs == 2
    assert result.num_compiled_steps == 0
    assert result.compile_s > result.prefill_s


def test_without_weights_the_demo_says_so_and_runs_a_random_decoder(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(smollm2, "PACKAGE", "no_such_package")
    subject = demo.load_subject(None, dtype=torch.float32, device="cpu")
    assert "not installed" in subject.note
    assert subject.name == "random decoder"


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["no_such_module:f"], "model: expected module:function"),
        (["/no/such/folder"], "model: expected a model's folder or name"),
        (["--budget", "3"], "budget: expected at least num_sink_tokens + 1 = 17, got 3"),
        ([f"{__name__}:tiny", "--context", "9999999"], "context: expected at most"),
        (["-o", __file__], "output: expected a folder"),
    ],
)
def test_bad_input_exits_with_2_and_says_what_was_expected(
    options: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert profile.main(["run", *options]) == 2
    assert message in capsys.readouterr().err


def test_a_damaged_cache_of_weights_is_made_anew(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(smollm2, "_gguf_file", lambda: tmp_path / "weights.gguf")
    monkeypatch.setattr(smollm2, "_read_gguf", lambda path: _saveable())
    folder = tmp_path / "clusterkv_ops" / "SmolLM2-135M-Instruct"
    folder.mkdir(parents=True)
    (folder / "config.json").write_text("{")
    demo.load_subject(None, dtype=torch.float32, device="cpu")
    assert json.loads((folder / "config.json").read_text())["num_hidden_layers"] == 3
    assert [path.name for path in folder.parent.iterdir()] == [folder.name]


class _SaveableTokenizer(demo.ByteTokenizer):
    def save_pretrained(self, folder: Path) -> None:
        (folder / "tokenizer_config.json").write_text("{}")


def _saveable() -> tuple[Any, Any]:
    return tiny()[0], _SaveableTokenizer()
