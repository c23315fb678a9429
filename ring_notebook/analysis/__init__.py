"""Reading a run: who failed first, where time goes, which ranks are slow, how a program scales. Pure functions."""
