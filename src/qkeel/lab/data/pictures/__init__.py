"""The images that come with qkeel; see NOTICE.txt for their makers and licences."""
