"""Stages between reading a source and the tokenizer: each a named rule with options, chosen per source."""
