"""What a rank and what starts it share: its environment, its status and its rendezvous."""
