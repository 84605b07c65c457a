"""What runs inside a job: notices, agreement, the run loop, requeue."""
