use super::*;
use crate::testdir::TestDir;

#[test]
fn the_command_lines_are_consistent() {
    // BIN-1, BIN-2
    for command in [Iop::command(), IopEdge::command(), IopNode::command()] {
        command.debug_assert();
    }
}

#[test]
fn hash_prints_what_the_config_wants_and_nothing_secret() {
    // REG-6
    for kind in [TokenKind::Node, TokenKind::ApiKey, TokenKind::Admin] {
        let token = Token::generate(kind).unwrap();
        let lines = hash_lines(&format!("{}\n", token.reveal())).unwrap();
        assert!(
            lines.contains(&token.hash().to_string())
                && (kind == TokenKind::Admin || lines.contains(token.id().as_str())),
            "{lines}"
        );
        assert!(!lines.contains(&token.reveal()[14..]), "{lines}");
    }
    let failure = hash_lines("SENTINEL").unwrap_err();
    assert!(failure.exit == Exit::Usage && !failure.to_string().contains("SENTINEL"), "{failure}");
}

#[test]
fn check_tells_the_two_files_apart_and_ends_with_2() {
    // BIN-4, BIN-5
    let dir = TestDir::new();
    let options = InitOptions { dir: dir.path().to_owned(), node: "n".to_owned(), ..InitOptions::default() };
    init(&options, SystemTime::now()).unwrap();
    let (edge, node) = (dir.path().join("edge.yaml"), dir.path().join("node.yaml"));
    assert_eq!(check_files(&[edge.clone(), node.clone()]), Ok(()));
    std::fs::write(&node, "edge: https://e\ntokenfile: x\n").unwrap();
    let failure = check_files(&[edge, node]).unwrap_err();
    assert_eq!(failure.exit, Exit::Usage);
    assert!(failure.message.contains("node.yaml"), "{failure}");
    assert_eq!(check_files(&[dir.path().join("none.yaml")]).unwrap_err().exit, Exit::Usage);
}

#[test]
fn every_program_and_every_command_has_a_page_of_its_own() {
    // BIN-1
    fn count(command: &clap::Command) -> usize {
        1 + command.get_subcommands().map(count).sum::<usize>()
    }
    let pages = man_pages().unwrap();
    let text = |name: &str| {
        let all: Vec<_> = pages.iter().filter(|(known, _)| known == name).collect();
        assert_eq!(all.len(), 1, "{name}");
        String::from_utf8(all[0].1.clone()).unwrap()
    };
    for (name, _) in &pages {
        text(name);
    }
    let commands: usize = [Iop::command(), IopEdge::command(), IopNode::command()].iter().map(count).sum();
    assert_eq!(pages.len(), commands);
    assert!(text("iop-node.1").contains("iop\\-node\\-serve(1)"));
    assert!(text("iop-cmd-node.1").contains("iop\\-cmd\\-node\\-add(1)"));
    let list = text("iop.1");
    assert!(list.contains("iop\\-cmd\\-node(1)") && !list.contains("iop\\-node(1)"), "{list}");
    assert!(text("iop-cmd-node-add.1").contains("iop node add"));
}

#[test]
fn what_node_renew_needs_is_one_of_two_and_the_config_is_not_asked_for() {
    // BIN-3, BIN-5
    let error = Iop::try_parse_from(["iop", "node", "renew"]).unwrap_err().to_string();
    assert!(error.contains("<NODE>\n       iop node renew [OPTIONS] --edge"), "{error}");
    assert!(!error.contains("--config"), "{error}");
    assert!(Iop::try_parse_from(["iop", "node", "renew", "gpu-1", "--force"]).is_err(), "--force is about the Edge's");
}
