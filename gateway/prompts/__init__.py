"""The served model's text: its template and tokenizer, and conversations as prompts."""
