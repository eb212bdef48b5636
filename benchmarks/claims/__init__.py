"""The claims of PagedAttention, measured with this code. `python -m claims` (benchmarks/ on the
path) runs all that need no GPU; `make claims` does. docs/paged-attention.md tells what came out.
"""
