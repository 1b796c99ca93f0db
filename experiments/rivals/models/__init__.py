"""Models as their authors write them. `annotate` is what an expert adds."""
