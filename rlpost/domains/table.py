"""The domains by name. A new one is a generator, a `Domain`, and a row here."""

import importlib

from rlpost import errors
from rlpost.domains.domain import Domain

DOMAINS = {
  'add': 'rlpost.domains.numbers:ADD',
  'bigger': 'rlpost.domains.numbers:BIGGER',
  'capitalize': 'rlpost.domains.text:CAPITALIZE',
  'choice': 'rlpost.domains.text:CHOICE',
  'color_of': 'rlpost.domains.text:COLOR_OF',
  'copy_words': 'rlpost.domains.text:COPY_WORDS',
  'count_word': 'rlpost.domains.numbers:COUNT_WORD',
  'count_words': 'rlpost.domains.numbers:COUNT_WORDS',
  'first_letter': 'rlpost.domains.text:FIRST_LETTER',
  'json_object': 'rlpost.domains.text:JSON_OBJECT',
  'largest': 'rlpost.domains.numbers:LARGEST',
  'last_word': 'rlpost.domains.text:LAST_WORD',
  'needle': 'rlpost.domains.text:NEEDLE',
  'next_letter': 'rlpost.domains.numbers:NEXT_LETTER',
  'next_number': 'rlpost.domains.numbers:NEXT_NUMBER',
  'odd_one_out': 'rlpost.domains.text:ODD_ONE_OUT',
  'quote': 'rlpost.domains.text:QUOTE',
  'recall_1024': 'rlpost.domains.recall:R1024',
  'recall_1024_new': 'rlpost.domains.recall:R1024_NEW',
  'recall_256': 'rlpost.domains.recall:R256',
  'recall_256_all': 'rlpost.domains.recall:R256_ALL',
  'recall_256_new': 'rlpost.domains.recall:R256_NEW',
  'recall_512': 'rlpost.domains.recall:R512',
  'recall_64': 'rlpost.domains.recall:R64',
  'recall_64_all': 'rlpost.domains.recall:R64_ALL',
  'recall_copy': 'rlpost.domains.recall:COPY',
  'recall_repeat': 'rlpost.domains.recall:REPEAT',
  'rg_chain_sum': 'rlpost.domains.reasoning:CHAIN_SUM',
  'rg_count_bits': 'rlpost.domains.reasoning:COUNT_BITS',
  'rg_gcd': 'rlpost.domains.reasoning:GCD',
  'rg_lcm': 'rlpost.domains.reasoning:LCM',
  'rg_letter_counting': 'rlpost.domains.reasoning:LETTER_COUNTING',
  'rg_number_sequence': 'rlpost.domains.reasoning:NUMBER_SEQUENCE',
  'rg_products': 'rlpost.domains.reasoning:PRODUCTS',
  'rg_simple_equations': 'rlpost.domains.reasoning:SIMPLE_EQUATIONS',
  'rg_spell_backward': 'rlpost.domains.reasoning:SPELL_BACKWARD',
  'sort_letters': 'rlpost.domains.numbers:SORT_LETTERS',
  'sort_numbers': 'rlpost.domains.numbers:SORT_NUMBERS',
  'subtract': 'rlpost.domains.numbers:SUBTRACT',
  'tiny_add': 'rlpost.domains.tiny:ADD',
  'tiny_copy': 'rlpost.domains.tiny:COPY',
  'tiny_first': 'rlpost.domains.tiny:FIRST',
  'tiny_reverse': 'rlpost.domains.tiny:REVERSE',
  'tiny_sort': 'rlpost.domains.tiny:SORT',
  'upper': 'rlpost.domains.text:UPPER',
}


def load(name: str) -> Domain:
  """The domain of this name; its module is imported now, not before.

  Raises:
    errors.InputError: there is none; the message lists those there are.
  """
  if name not in DOMAINS:
    known = ', '.join(sorted(DOMAINS))
    raise errors.InputError(f'No domain {name!r}; known ones: {known}.')
  module, _, attribute = DOMAINS[name].partition(':')
  return getattr(importlib.import_module(module), attribute)
