"""What a person sees of a run: the live panel, and the report that stays in the saved notebook."""
