"""Programs of a lab: bringing labs up and down, the lab's process, and commands that inspect a running lab."""
