"""The live page: reads one service, and shows it in the browser on this machine."""
