"""Compiles attention completely for TPUs and GPUs on a machine that has neither.

libtpu and JAX's CUDA plugin compile for a described device as for a real one. That proves what no
interpreter can: that a kernel fits the memory of each chip, that no layout makes XLA copy the pool
at every call, that a donated pool is written in place, and that a program sharded over KV heads
does not communicate. `matrix` says what is compiled, `machines` for what, `check` what a program
must keep to, and `runner` runs each chip in a process of its own.

`da-jax bench aot` prints the rows; `pip install 'da-jax[aot]'` installs the compilers.
"""

from da_jax.kernels.aot.machines import MACHINES, Machine, installed
from da_jax.kernels.aot.runner import rows

__all__ = ["MACHINES", "Machine", "installed", "rows"]
