"""Files and folders of one user: private, claimed, and compared."""
