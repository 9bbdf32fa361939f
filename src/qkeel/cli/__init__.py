"""The command line.

The files by command:

    app              the program `qkeel`; commands: their table, the help and the exit codes, which import no library
    watch            `qkeel watch`: python_program runs the script, model_finder finds its models, watch_session watches
                     and records them, run_messages writes the lines that begin with `qkeel:`
    run              `qkeel run`, `demo` and the studies, whose lines `console` prints
    audit            `qkeel check`, `scan`, `export` and `convert`
    report           `qkeel report`, `figures`, `explain NAME`, and the lists of presets and remedies
    retired          commands of earlier versions
    parameters       the kinds of options that several commands share; output: what standard output can take
"""
