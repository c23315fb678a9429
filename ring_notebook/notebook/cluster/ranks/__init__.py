"""The engines of a running cluster, one by one: made ready, looked at, missed when they die, started again."""
