from packtrain.cli import main

main()
