"""Images: task, data, networks, criterion, and the loop that trains and tests."""
