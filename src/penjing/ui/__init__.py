"""The local web app: runs, training, plans, data and chat on one page (`penjing ui`)."""
