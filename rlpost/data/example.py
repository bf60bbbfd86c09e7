"""What a supervised stage learns from, as text."""

from typing import NamedTuple


class Example(NamedTuple):
  """A prompt and what is to follow it.

  Attributes:
    prompt: the text; of a conversation, its messages as JSON.
    completion: the text, with the stop that ends it; of a conversation, what
      the assistant says, since the chat template adds the end.
    domain: name of the domain that made it.
    content_id: of the task behind it.
  """

  prompt: str
  completion: str
  domain: str
  content_id: str
