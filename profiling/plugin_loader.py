"""TensorBoard's way to our tab. TensorBoard imports this module at every start of any user who has
the package installed, and one failing plugin stops it altogether: nothing here may fail, and torch
is never imported.
"""

from __future__ import annotations

import logging
from typing import Any

try:
    from tensorboard.plugins.base_plugin import TBLoader
except ImportError:  # imported by something else than TensorBoard
    TBLoader = object

log = logging.getLogger(__name__)


class ClusterKVLoader(TBLoader):
    """Makes the plugin, or leaves the tab out and says why."""

    def load(self, context: Any) -> Any:
        """The plugin of one TensorBoard; None where it can't work."""
        try:
            from clusterkv_ops.profiling.plugin import ClusterKVPlugin

            return ClusterKVPlugin(context)
        except Exception as error:
            log.warning("the ClusterKV tab is left out: %s", error)
            return None
