"""`framechat mock`: a server that answers as a GPU would in time, and with made-up text: the simulator in real time."""
