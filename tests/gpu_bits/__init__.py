"""The steps of both packages as an H100 would run them: executed in NumPy, held against the contract.

`make gpu-bits` compiles the steps; the interpreter `tools/ptx` runs their programs on arrays in memory.
Read it in this order:

- `steps` says which steps are executed, of which formats (`moment_formats`) and numbers, and what is not.
- `xla_backend` and `triton_backend` take those steps: `triton_launches` runs the kernels of torch.compile.
- `interpreted_steps` runs the text of a kernel in Triton's own interpreter instead.
- `comparison` holds them against the contract.
- `test_xla_controls` and `test_triton_controls` show what the comparison sees, and what it is blind to.
"""
