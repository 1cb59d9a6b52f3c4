"""Pages that are one file: elements as text, a style sheet and the frame around both."""
