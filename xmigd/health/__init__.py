"""What is wrong with the node's devices: seen early, graded, and answered on the lowest rung that helps."""
