"""How the shipped demo model is made: corpus, tokenizer, training, export, checks. See README.md."""
