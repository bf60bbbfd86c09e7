"""Failures that a launcher turns into an exit code.

An error says what was wrong, with the numbers, and how to cure it.
"""


class RunError(Exception):
  """A failure with a known cause; `exit_code` is what the launcher returns."""

  exit_code = 1


class InputError(RunError):
  """Bad input, a changed config, or a missing extra."""

  exit_code = 2


class DoesNotFitError(RunError):
  """The work needs more memory than the machine has."""

  exit_code = 3


class NonFiniteError(RunError):
  """A loss, a gradient or a reward was NaN or infinite."""

  exit_code = 4


class LostWorkerError(RunError):
  """A worker process died and could not be replaced."""

  exit_code = 5


class DamagedStateError(RunError):
  """Saved state is incomplete or does not match its digest."""

  exit_code = 5


class SavedAfterSignal(RunError):
  """SIGTERM arrived; the state was saved and the same command resumes."""

  exit_code = 75
