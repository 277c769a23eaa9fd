"""Where the time of a ClusterKV run goes, read from a PyTorch profiler trace.

Reading order: `intervals` (the algebra), `trace` (what a file says), `timeline` (who did what
when), then one module a question: `accounting`, `copies`, `lanes`, `waits`, `contention`. `report`
collects the answers; `terminal`, `page` and `png` show them. Only the standard library is needed
up to there.
"""
