"""The graph rewrite: find attention sites (sites), replace them (rewrite), run them (runtime)."""
