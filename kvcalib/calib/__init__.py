"""The calibration stages, in order: collect, fisher, outliers, codebooks, export.

Each is one function with plain arguments that writes safetensors into the folder `out` and returns
a JSON summary. `taps` is how keys and values are read from a model, `files` how tensors are stored.
"""
