"""Tests of the documentation as it is built."""
