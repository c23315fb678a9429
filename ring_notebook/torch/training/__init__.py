"""What a training loop needs besides collectives: prepare, data, checkpoints, schedules."""
