"""The cluster: started, asked, found again, ended."""
