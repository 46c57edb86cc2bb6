use super::*;

/// A candidate with these places in use, of these, with this weight.
fn candidate(provider: &ProviderId, in_use: u32, capacity: u32, weight: u32) -> FreeCandidate<'_> {
    FreeCandidate { provider, in_use, capacity, weight, penalty: 0, turn: 0, last_admission: 0 }
}

fn choose(candidates: &[(u32, u32, u32, u64)]) -> Option<usize> {
    let id = ProviderId::new("p").unwrap();
    let candidates: Vec<_> = candidates
        .iter()
        .map(|&(in_use, capacity, weight, last_admission)| FreeCandidate {
            last_admission,
            ..candidate(&id, in_use, capacity, weight)
        })
        .collect();
    LeastLoaded.choose(SelectionRequest::default(), &candidates)
}

#[test]
fn the_least_loaded_relative_to_places_and_weight_wins() {
    // SEL-1
    assert_eq!(choose(&[]), None);
    assert_eq!(choose(&[(3, 8, 1, 0), (2, 4, 1, 0)]), Some(0), "3/8 is less than 2/4");
    assert_eq!(choose(&[(2, 8, 1, 0), (2, 8, 3, 0)]), Some(1), "the heavier one takes more");
    assert_eq!(choose(&[(0, 1, 1, 7), (0, 9, 1, 5)]), Some(1), "equals take turns");
    assert_eq!(choose(&[(u32::MAX - 1, u32::MAX, u32::MAX, 0), (0, 1, 1, 0)]), Some(1), "nothing overflows");
}

#[test]
fn a_provider_that_failed_lately_is_loaded_for_every_policy() {
    // SEL-4
    let (a, b) = (ProviderId::new("a").unwrap(), ProviderId::new("b").unwrap());
    let ill = FreeCandidate { penalty: 1000, ..candidate(&a, 0, 8, 1) };
    let busy = FreeCandidate { turn: 9, ..candidate(&b, 7, 8, 1) };
    for strategy in Strategy::ALL {
        for prefix in 0..50 {
            let chosen = policy(*strategy).choose(SelectionRequest { prefix }, &[ill, busy]);
            assert_eq!(chosen, Some(1), "{strategy}: 7 of 8 places is less than one failure");
            assert_eq!(
                policy(*strategy).choose(SelectionRequest { prefix }, &[ill]),
                Some(0),
                "{strategy}: better than none"
            );
        }
    }
}

#[test]
fn ordered_takes_the_first_and_round_robin_whose_turn_it_is() {
    // SEL-1
    let (a, b) = (ProviderId::new("a").unwrap(), ProviderId::new("b").unwrap());
    let (first, second) = (candidate(&a, 7, 8, 1), candidate(&b, 0, 8, 9));
    let request = SelectionRequest::default();
    assert_eq!(Ordered.choose(request, &[first, second]), Some(0));
    assert_eq!(RoundRobin.choose(request, &[first, second]), Some(0), "equal turns: config order");
    assert_eq!(
        RoundRobin.choose(request, &[FreeCandidate { turn: 2, ..first }, FreeCandidate { turn: 1, ..second }]),
        Some(1)
    );
    for strategy in Strategy::ALL {
        assert_eq!(policy(*strategy).choose(request, &[]), None);
    }
}

#[test]
fn a_prefix_stays_with_its_provider_while_that_is_not_much_busier() {
    // SEL-1
    let ids: Vec<_> = (0..4).map(|n| ProviderId::new(format!("p{n}")).unwrap()).collect();
    let all: Vec<_> = ids.iter().map(|id| candidate(id, 0, 8, 1)).collect();
    let home = |prefix, candidates: &[FreeCandidate<'_>]| {
        let chosen = PrefixAffinity.choose(SelectionRequest { prefix }, candidates).unwrap();
        candidates[chosen].provider.clone()
    };
    let mut shares = [0; 4];
    for prefix in 1..=4000 {
        let first = home(prefix, &all);
        shares[ids.iter().position(|id| *id == first).unwrap()] += 1;
        assert_eq!(home(prefix, &all), first, "always the same");
        // Another one that goes moves nothing of this one's.
        let rest: Vec<_> = all.iter().filter(|c| *c.provider == first || *c.provider != ids[3]).copied().collect();
        assert_eq!(home(prefix, &rest), first);
        let home_id = first.clone();
        let home_id = &home_id;
        let loaded = |in_use| {
            all.iter().map(move |c| FreeCandidate { in_use: if c.provider == home_id { in_use } else { 1 }, ..*c })
        };
        assert_eq!(home(prefix, &loaded(3).collect::<Vec<_>>()), first, "a quarter of its places busier: kept");
        assert_ne!(home(prefix, &loaded(4).collect::<Vec<_>>()), first, "more than that: gives way");
    }
    assert!(shares.iter().all(|share| (850..1150).contains(share)), "an even spread: {shares:?}");
    let heavy: Vec<_> = ids.iter().take(2).zip([1, 3]).map(|(id, weight)| candidate(id, 0, 8, weight)).collect();
    let second = (1..=4000).filter(|prefix| home(*prefix, &heavy) == ids[1]).count();
    assert!((2850..3150).contains(&second), "three quarters by weight: {second}");
}
