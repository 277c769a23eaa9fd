"""torch-tb-profiler without internet: the stock plugin, its two remote scripts served from here.

Its page loads Google Charts and its trace viewer loads a polyfill; without them every view is an
endless spinner. `static/charts.js` stands in for the former, the latter is in `static/vendor`.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from torch_tb_profiler.plugin import TorchProfilerPlugin
from werkzeug import Request, Response

from clusterkv_ops.profiling.plugin import respond

_STATIC = Path(__file__).parent / "static"
_SCRIPTS = {
    "/charts.js": _STATIC / "charts.js",
    "/webcomponents.min.js": _STATIC / "vendor" / "webcomponents.min.js",
}
# Page -> (address in the page, address that is served instead).
_REPLACED = {
    "/index.html": (b"https://www.gstatic.com/charts/loader.js", b"./charts.js"),
    "/trace_embedding.html": (
        b"https://cdnjs.cloudflare.com/ajax/libs/webcomponentsjs/0.7.24/webcomponents.min.js",
        b"./webcomponents.min.js",
    ),
}


class OfflineProfilerPlugin(TorchProfilerPlugin):
    """The stock plugin under its own name."""

    def get_plugin_apps(self) -> dict[str, Any]:
        """The stock addresses, the two pages rewritten, and the scripts they ask for."""
        apps = super().get_plugin_apps()
        for address, (remote, local) in _REPLACED.items():
            apps[address] = _page(address, remote, local)
        for address, path in _SCRIPTS.items():
            apps[address] = _script(path)
        return apps


def _page(address: str, remote: bytes, local: bytes) -> Any:
    import torch_tb_profiler

    path = Path(torch_tb_profiler.__file__).parent / "static" / address.removeprefix("/")

    @Request.application
    def application(request: Request) -> Response:
        return respond(path.read_bytes().replace(remote, local), "text/html")

    return application


def _script(path: Path) -> Any:
    @Request.application
    def application(request: Request) -> Response:
        return respond(path.read_bytes(), "application/javascript")

    return application
