"""Many runs after one another, and runs that end at any step."""
