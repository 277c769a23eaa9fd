"""The sub-commands of `python -m clusterkv_ops.profile`, one a module."""
