"""The ClusterKV tab of TensorBoard: lists runs, shows the report of one, compares two.

    /index.js                     the tab's own script
    /runs                         JSON: [{"name", "headline", "can_compare"}]
    /report?run=NAME              the page that `profile tensorboard` wrote
    /compare?left=NAME&right=NAME a page made of two reports

A run is looked up among the files found in the log directory; no path comes from the URL.
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
from clusterkv_ops.profiling.event_files import PAGE_SUFFIX, REPORT_SUFFIX
from clusterkv_ops.profiling.reader import TraceError
from clusterkv_ops.profiling.report import Report, load_report

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
        return bool(self._pages())

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

    def _pages(self) -> dict[str, Path]:
        """Run -> its page; runs are named by folder and file, as TensorBoard names them."""
        found = {}
        for path in sorted(self._logdir.rglob(f"*{PAGE_SUFFIX}")):
            name = path.relative_to(self._logdir).as_posix().removesuffix(PAGE_SUFFIX)
            found[name] = path
        return found

    def _load(self, name: str | None) -> Report | None:
        page = self._pages().get(name or "")
        if page is None:
            return None
        try:
            return load_report(str(page).removesuffix(PAGE_SUFFIX) + REPORT_SUFFIX)
        except TraceError:
            return None

    def _script(self, request: Request) -> Response:
        return respond(_SCRIPT.read_bytes(), "application/javascript")

    def _runs(self, request: Request) -> Response:
        runs = []
        for name in self._pages():
            report = self._load(name)
            headline = report.headline if report else ""
            runs.append({"name": name, "headline": headline, "can_compare": report is not None})
        return respond(json.dumps(runs), "application/json")

    def _report(self, request: Request) -> Response:
        page = self._pages().get(request.args.get("run", ""))
        return _html(page.read_bytes() if page else None)

    def _compare(self, request: Request) -> Response:
        names = [request.args.get(side) for side in ("left", "right")]
        left, right = (self._load(name) for name in names)
        if left is None or right is None:
            return _html(None)
        return _html(render_comparison(left, right, *map(str, names)).encode())


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
