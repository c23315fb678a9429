"""How the ranks of a job are started: one file per launcher behind one interface, and the hosts they start ranks on."""
