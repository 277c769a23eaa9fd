"""A Llama split over two processes generates what the whole model generates."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from clusterkv_ops import ClusterKVConfig
from clusterkv_ops.graphs import clusterkv_backend
from tests.graphs.models import make, prompt
from tests.graphs.talks import ALL, SMALL

pytest.importorskip("accelerate", reason="transformers needs it to split a model")

ROOT = Path(__file__).parents[2]
TIMEOUT_S = 240
ENVIRONMENT = {
    "OMP_NUM_THREADS": "1",
    "GLOO_SOCKET_IFNAME": "lo",
    "PYTHONPATH": str(ROOT),
    "PYTHONFAULTHANDLER": "1",
}
SCRIPT = """
import json, sys
import torch
from transformers import LlamaForCausalLM
from clusterkv_ops import ClusterKVConfig
from clusterkv_ops.graphs import clusterkv_backend
from tests.graphs.models import prompt

folder, settings = sys.argv[1], json.loads(sys.argv[2])
torch.set_num_threads(1)
torch.distributed.init_process_group("gloo")
rank = torch.distributed.get_rank()
found = {}
for name, fields in settings.items():
    torch._dynamo.reset()
    model = LlamaForCausalLM.from_pretrained(folder, tp_plan="auto").eval()
    backend = clusterkv_backend(config=ClusterKVConfig(**fields), inner="eager")
    model.compile(backend=backend)
    tokens = model.generate(prompt(1, 100), max_new_tokens=24, do_sample=False, pad_token_id=0)
    stats = backend.stats()
    found[name] = [tokens[0].tolist(), stats.sparse_steps, stats.sites_skipped]
with open(f"{folder}/found-{rank}.json", "w") as file:
    json.dump(found, file)
torch.distributed.destroy_process_group()
"""


@pytest.mark.slow
def test_two_ranks_generate_what_one_process_does(tmp_path: Path) -> None:
    settings = {"all": ALL, "small": SMALL}
    expected = {name: _generated(config) for name, config in settings.items()}
    make("llama").save_pretrained(tmp_path)
    (tmp_path / "rank.py").write_text(SCRIPT)
    _run(tmp_path, json.dumps({name: vars(config) for name, config in settings.items()}))
    for rank in (0, 1):
        found = json.loads((tmp_path / f"found-{rank}.json").read_text())
        for name, (tokens, sparse_steps, skipped) in found.items():
            assert tokens == expected[name], (rank, name)
            assert skipped == 0
            assert (sparse_steps > 0) == (name == "small")


def _generated(config: ClusterKVConfig) -> list[int]:
    """By one process; with the budget that covers the context, by the plain model."""
    model = make("llama")
    if config is not ALL:
        model.compile(backend=clusterkv_backend(config=config, inner="eager"))
    tokens = model.generate(prompt(1, 100), max_new_tokens=24, do_sample=False, pad_token_id=0)
    found: list[int] = tokens[0].tolist()
    return found


def _run(folder: Path, settings: str) -> None:
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node=2"]
    command += ["--rdzv-backend=c10d", "--rdzv-endpoint=127.0.0.1:0", "--local-addr=127.0.0.1"]
    done = subprocess.run(
        [*command, str(folder / "rank.py"), str(folder), settings],
        cwd=ROOT,
        env={**os.environ, **ENVIRONMENT},
        capture_output=True,
        text=True,
        timeout=TIMEOUT_S,
    )
    assert done.returncode == 0, done.stderr[-3000:]
