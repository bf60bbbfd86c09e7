"""Checks that fail, in a module that workers import at once."""

import os

from rlpost.rewards import checkers


def check_with_faults(items):
  """As `checkers.check_many`, for answers that are not one of two."""
  for _, answer in items:
    while answer == 'HANG':
      pass
    if answer == 'DIE':
      os._exit(1)
  return checkers.check_many(items)
