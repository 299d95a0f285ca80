"""How models call tools: the format, its grammar, its parser, and what the prompt tells of them."""
