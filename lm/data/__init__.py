"""Sources, tokenizer, shards and the order in which samples are visited."""
