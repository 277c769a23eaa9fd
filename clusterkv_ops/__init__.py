"""ClusterKV for PyTorch: sparse decoding over clustered keys, for any decoder."""

__version__ = "0.1.0"
