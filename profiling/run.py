"""What `run` does: the dense pass, the pass with ClusterKV, the table, the files."""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from clusterkv_ops.clustering import cluster_keys
from clusterkv_ops.config import ClusterKVConfig
from clusterkv_ops.graphs.backend import clusterkv_backend
from clusterkv_ops.profiling.compat import compat_name, write_compat
from clusterkv_ops.profiling.demo import Subject, best_dtype, document, load_subject
from clusterkv_ops.profiling.event_files import write_events
from clusterkv_ops.profiling.machine import machine, machine_line
from clusterkv_ops.profiling.measure import RunResult, compiled_in_place, run_model
from clusterkv_ops.profiling.page import render_page
from clusterkv_ops.profiling.recording import operator_seconds, save_trace
from clusterkv_ops.profiling.report import Report, build_report, save_report
from clusterkv_ops.profiling.sources import REPORT_NAME
from clusterkv_ops.profiling.summary import Summary, notes, summary_table
from clusterkv_ops.profiling.terminal import print_tables
from clusterkv_ops.profiling.timeline import read_timeline

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
TRACE_NAME = "run.kineto.json.gz"

OnStage = Callable[[str, str, int, int], None]


def execute_run(arguments: argparse.Namespace) -> int:
    """Both passes; prints the table, writes the folder and the JSON file. Returns 0."""
    config = ClusterKVConfig(
        budget=arguments.budget,
        offload=arguments.offload,
        async_clustering=not arguments.no_async,
    )
    if arguments.output.exists() and not arguments.output.is_dir():
        raise ValueError(f"output: expected a folder, got the file {arguments.output}")
    with _stages() as on_stage:
        on_stage("loading", "the model", 0, 1)
        subject = _load(arguments)
        tokens = document(subject.tokenizer, arguments.context + arguments.held_out)
        on_stage("loading", "the model", 1, 1)
        dense = _dense_pass(subject, tokens, arguments, on_stage)
        summary = _sparse_pass(subject, tokens, config, arguments, dense, on_stage)
    report = _write_folder(summary, arguments.output)
    _print(summary, report, arguments.output)
    if arguments.json:
        run = {"machine": machine(), **summary.to_json()}
        arguments.json.write_text(json.dumps({**report.to_json(), "run": run}, indent=1) + "\n")
        print(arguments.json)
    return 0


def _load(arguments: argparse.Namespace) -> Subject:
    from transformers.utils import logging

    logging.disable_progress_bar()
    dtype = DTYPES[arguments.dtype] if arguments.dtype else best_dtype(arguments.device)
    return load_subject(arguments.model, dtype=dtype, device=arguments.device)


def _dense_pass(
    subject: Subject, tokens: list[int], arguments: argparse.Namespace, on_stage: OnStage
) -> RunResult | None:
    if arguments.baseline == "none":
        return None
    backend = "inductor" if arguments.baseline == "compiled" else None
    with compiled_in_place(subject.model, backend):
        result = run_model(
            subject.model,
            tokens,
            num_context=arguments.context,
            num_new=arguments.tokens,
            on_progress=partial(on_stage, "dense"),
        )
    result.cache = None
    return result


def _sparse_pass(
    subject: Subject,
    tokens: list[int],
    config: ClusterKVConfig,
    arguments: argparse.Namespace,
    dense: RunResult | None,
    on_stage: OnStage,
) -> Summary:
    backend = clusterkv_backend(config=config)
    with compiled_in_place(subject.model, backend):
        sparse = run_model(
            subject.model,
            tokens,
            num_context=arguments.context,
            num_new=arguments.tokens,
            is_profiled=True,
            count_kv_bytes=lambda: backend.stats().kv_bytes_read,
            on_progress=partial(on_stage, "ClusterKV"),
        )
    stats = backend.stats()
    return Summary(
        settings=_settings(subject, arguments),
        sparse=sparse,
        dense=dense,
        clustering_s=_clustering_seconds(sparse.cache, config, arguments.context),
        selection_s=sum(
            operator_seconds(part, "clusterkv::select_clusters") for part in sparse.profiles
        ),
        stats={**asdict(stats), "hit_rate": stats.hit_rate},
    )


def _settings(subject: Subject, arguments: argparse.Namespace) -> dict[str, Any]:
    names = ("context", "tokens", "held_out", "budget", "offload", "device", "baseline")
    return {
        "model": subject.name,
        "note": subject.note,
        "dtype": str(subject.model.dtype).removeprefix("torch."),
        **{name: getattr(arguments, name) for name in names},
        "async_clustering": not arguments.no_async,
    }


def _clustering_seconds(cache: Any, config: ClusterKVConfig, num_context: int) -> float:
    """Seconds to cluster the document's keys of every layer, with nothing running beside."""
    start = time.perf_counter()
    for layer in cache.layers[config.dense_layers :]:
        keys = layer.keys[:, :, config.num_sink_tokens : num_context]
        num_clusters = keys.shape[2] // config.tokens_per_cluster
        if num_clusters:
            index = cluster_keys(
                keys, num_clusters=num_clusters, max_iter=config.max_iter, seed=config.seed
            )
            index.indptr.cpu()  # waits for the device
    return time.perf_counter() - start


def _write_folder(summary: Summary, folder: Path) -> Report:
    """The trace, and what it says: JSON, page, and TensorBoard's files where that is installed."""
    folder.mkdir(parents=True, exist_ok=True)
    trace = folder / TRACE_NAME
    save_trace(summary.sparse.profiles, trace, summary.stats)
    timeline = read_timeline(trace)
    report = build_report(timeline)
    save_report(report, folder / REPORT_NAME)
    (folder / "report.html").write_text(render_page(report, timeline))
    write_compat(trace, folder / compat_name(trace))
    with suppress(ImportError):
        write_events(report, timeline, folder)
    return report


def _print(summary: Summary, report: Report, folder: Path) -> None:
    if summary.settings["note"]:
        print(f"Note: {summary.settings['note']}.")
    print_tables([summary_table(summary)])
    print("\n".join([*notes(summary), f"Machine: {machine_line()}."]))
    print(f"Trace: {report.headline}\nReport: {folder / 'report.html'}")


@contextmanager
def _stages() -> Iterator[OnStage]:
    """A progress bar a stage on stderr; where that is no terminal, a line when a stage is done."""
    columns = (
        TextColumn("{task.description:>28}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
    )
    bars: dict[str, Any] = {}
    started: dict[str, float] = {}
    console = Console(stderr=True)

    with Progress(*columns, console=console, disable=not console.is_terminal) as progress:

        def on_stage(who: str, what: str, done: int, total: int) -> None:
            name = f"{who}: {what}"
            if name not in bars:
                bars[name] = progress.add_task(name, total=total)
                started[name] = time.monotonic()
            progress.update(bars[name], completed=done)
            if done == total and not console.is_terminal:
                print(f"{name}, {time.monotonic() - started[name]:.0f} s", file=sys.stderr)

        yield on_stage
