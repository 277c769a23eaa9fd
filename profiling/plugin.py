"""The ClusterKV tab of TensorBoard: lists runs, shows the report of one, compares two.

    /index.js                     the tab's own script
    /runs                         JSON: [{"name", "headline", "can_compare"}]
    /report?run=NAME              the run's report.html
    /compare?left=NAME&right=NAME a page made of two reports

A run is a folder with our report.json and report.html, looked up among those in the log directory;
no path comes from the URL.
"""

from __future__ import annotations

import base64
import hashlib
import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tensorboard.plugins import base_plugin
from werkzeug import Request, Response

from clusterkv_ops.profiling.comparison_page import render_comparison
from clusterkv_ops.profiling.reader import TraceError
from clusterkv_ops.profiling.report import SCHEMA, Report, load_report
from clusterkv_ops.profiling.sources import PAGE_NAME, REPORT_NAME

_INLINE_SCRIPT = re.compile(rb"<script>(.*?)</script>", re.DOTALL)
_SCRIPT = Path(__file__).parent / "static" / "tab.js"


class ClusterKVPlugin(base_plugin.TBPlugin):
    """Serves the tab's five addresses."""

    plugin_name = "clusterkv"

    def __init__(self, context: Any) -> None:
        super().__init__(context)
        self._logdir = Path(context.logdir or ".")

    def is_active(self) -> bool:
        """Whether the log directory contains any report."""
        return bool(self._folders())

    def frontend_metadata(self) -> Any:
        """The tab's name and script."""
        return base_plugin.FrontendMetadata(es_module_path="/index.js", tab_name="ClusterKV")

    def get_plugin_apps(self) -> dict[str, Any]:
        """Address -> application."""
        return {
            "/index.js": _application(self._script),
            "/runs": _application(self._runs),
            "/report": _application(self._report),
            "/compare": _application(self._compare),
        }

    def _folders(self) -> dict[str, Path]:
        """Run -> its folder; named by the path below the log directory, as TensorBoard does."""
        return {
            path.parent.relative_to(self._logdir).as_posix(): path.parent
            for path in sorted(self._logdir.rglob(REPORT_NAME))
            if (path.parent / PAGE_NAME).exists() and _is_report(path)
        }

    def _load(self, name: str | None) -> Report | None:
        folder = self._folders().get(name or "")
        try:
            return load_report(folder / REPORT_NAME) if folder else None
        except TraceError:
            return None

    def _script(self, request: Request) -> Response:
        return respond(_SCRIPT.read_bytes(), "application/javascript")

    def _runs(self, request: Request) -> Response:
        runs = []
        for name in self._folders():
            report = self._load(name)
            headline = report.headline if report else "its report.json is damaged"
            runs.append({"name": name, "headline": headline, "can_compare": report is not None})
        return respond(json.dumps(runs), "application/json")

    def _report(self, request: Request) -> Response:
        folder = self._folders().get(request.args.get("run", ""))
        return _html((folder / PAGE_NAME).read_bytes() if folder else None)

    def _compare(self, request: Request) -> Response:
        names = [request.args.get(side) for side in ("left", "right")]
        left, right = (self._load(name) for name in names)
        if left is None or right is None:
            return _html(None)
        return _html(render_comparison(left, right, *map(str, names)).encode())


def _is_report(path: Path) -> bool:
    """Other programs write files of that name, too; ours names its schema first."""
    with open(path, "rb") as stream:
        return SCHEMA.encode() in stream.read(100)


def _application(handle: Callable[[Request], Response]) -> Any:
    return Request.application(handle)


def respond(content: bytes | str, content_type: str, **headers: str) -> Response:
    """A response that no browser may take for something else; TensorBoard insists on it."""
    response = Response(content, content_type=content_type)
    response.headers["X-Content-Type-Options"] = "nosniff"
    response.headers["Cache-Control"] = "no-store"
    response.headers.update(headers)
    return response


def _html(content: bytes | None) -> Response:
    """A page that may run its own scripts and load nothing."""
    if content is None:
        response = respond("no such run", "text/plain")
        response.status_code = 404
        return response
    digests = [hashlib.sha256(script).digest() for script in _INLINE_SCRIPT.findall(content)]
    scripts = [f"'sha256-{base64.b64encode(digest).decode()}'" for digest in digests] or ["'none'"]
    policy = "default-src 'none'; style-src 'unsafe-inline'; script-src " + " ".join(scripts)
    return respond(content, "text/html; charset=utf-8", **{"Content-Security-Policy": policy})
