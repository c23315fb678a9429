"""Tests of the native core, with ranks as threads and as processes."""
