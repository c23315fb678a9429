"""Words for people: numbers and names in sentences, errors as text, options of a line."""
