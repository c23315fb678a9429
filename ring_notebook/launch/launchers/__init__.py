"""How the ranks of a job are started: launchers behind one interface, and the hosts they start ranks on."""
