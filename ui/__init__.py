"""The `framechat` command and the Streamlit pages."""
