"""Output that must follow a form: the form as a grammar, checked before it is sent."""
