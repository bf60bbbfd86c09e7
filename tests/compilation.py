"""Executables that take little time to make: most of a test's is compiling."""

import jax

# A program that runs once need not be fast. The fusion emitters are most of
# what XLA's CPU back end spends on small programs.
FAST = {
    'xla_backend_optimization_level': 0,
    'xla_cpu_use_fusion_emitters': False,
}


def compiled(function, *arguments):
  """The function for arguments of these shapes."""
  return jax.jit(function).lower(*arguments).compile(FAST)
