function __meshllm_complete
    env _MESHLLM_COMPLETE=complete_fish _TYPER_COMPLETE_FISH_ACTION=$argv[1] \
        _TYPER_COMPLETE_ARGS=(commandline -cp) meshllm
end

complete --command meshllm --no-files --arguments "(__meshllm_complete get-args)" \
    --condition "__meshllm_complete is-args"
